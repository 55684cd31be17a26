package elasticrec;

import com.baidu.brpc.client.BrpcProxy;
import com.baidu.brpc.client.RpcClient;
import com.baidu.brpc.client.RpcClientOptions;
import com.baidu.brpc.exceptions.RpcException;
import com.baidu.brpc.interceptor.AbstractInterceptor;
import com.baidu.brpc.interceptor.Interceptor;
import com.baidu.brpc.protocol.BrpcMeta;
import com.baidu.brpc.protocol.Options.CompressType;
import com.baidu.brpc.protocol.Options.ProtocolType;
import com.baidu.brpc.protocol.Request;
import com.google.protobuf.ByteString;
import elasticrec.general_model.GeneralModel;
import elasticrec.mcube.Cube;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/**
 * Scores the samples on stdin (`show click sign:slot …`) with several threads. Prints a score per line, then the rows of the
 * keys, then the error of a call to an unknown method.
 *
 * <p>Arguments: host:port, threads, samples per request, compression (NONE, GZIP or ZLIB), token or `-`, keys.
 */
public final class Main {
  interface GeneralModelService {
    @BrpcMeta(
        serviceName = "baidu.paddle_serving.predictor.general_model.GeneralModelService",
        methodName = "inference")
    GeneralModel.Response inference(GeneralModel.Request request);

    @BrpcMeta(
        serviceName = "baidu.paddle_serving.predictor.general_model.GeneralModelService",
        methodName = "train")
    GeneralModel.Response train(GeneralModel.Request request);
  }

  interface DictService {
    @BrpcMeta(serviceName = "rec.mcube.DictService", methodName = "seek")
    Cube.DictResponse seek(Cube.DictRequest request);
  }

  private Main() {}

  public static void main(String[] arguments) {
    try {
      run(arguments);
    } catch (Throwable error) {
      error.printStackTrace();
      // The threads of the clients would keep the process alive.
      System.exit(1);
    }
    System.exit(0);
  }

  private static void run(String[] arguments) throws Exception {
    int threads = Integer.parseInt(arguments[1]);
    int together = Integer.parseInt(arguments[2]);
    RpcClientOptions options = new RpcClientOptions();
    options.setProtocolType(ProtocolType.PROTOCOL_BAIDU_STD_VALUE);
    options.setCompressType(CompressType.valueOf("COMPRESS_TYPE_" + arguments[3]));
    options.setConnectTimeoutMillis(10_000);
    options.setReadTimeoutMillis(60_000);
    options.setWriteTimeoutMillis(10_000);
    options.setMaxTotalConnections(threads);
    String url = "list://" + arguments[0];
    RpcClient modelClient = new RpcClient(url, options, authorize(arguments[4]));
    RpcClient dictClient = new RpcClient(url, options, authorize(arguments[4]));
    GeneralModelService model = BrpcProxy.getProxy(modelClient, GeneralModelService.class);
    DictService dict = BrpcProxy.getProxy(dictClient, DictService.class);

    List<String> lines = new BufferedReader(new InputStreamReader(System.in)).lines().toList();
    ExecutorService pool = Executors.newFixedThreadPool(threads);
    List<Future<GeneralModel.Response>> answers = new ArrayList<>();
    for (int start = 0; start < lines.size(); start += together) {
      List<String> some = lines.subList(start, Math.min(start + together, lines.size()));
      long logId = start + 1;
      answers.add(
          pool.submit(
              () -> {
                GeneralModel.Response response = model.inference(request(some, logId));
                if (response.getErrNo() != 0 || response.getLogId() != logId) {
                  throw new IllegalStateException(response.toString());
                }
                return response;
              }));
    }
    StringBuilder text = new StringBuilder();
    for (Future<GeneralModel.Response> answer : answers) {
      GeneralModel.Response response = answer.get();
      for (float score : response.getOutputs(0).getTensor(0).getFloatDataList()) {
        text.append("score ").append(score).append('\n');
      }
    }
    Cube.DictRequest.Builder keys = Cube.DictRequest.newBuilder().setVersionRequired(true);
    for (int at = 5; at < arguments.length; ++at) {
      keys.addKeys(Long.parseUnsignedLong(arguments[at]));
    }
    Cube.DictResponse rows = dict.seek(keys.build());
    text.append("version ").append(rows.getVersion()).append('\n');
    for (Cube.DictValue value : rows.getValuesList()) {
      text.append("row ").append(value.getStatus());
      for (float number : floats(value.getValue())) {
        text.append(' ').append(number);
      }
      text.append('\n');
    }
    try {
      model.train(GeneralModel.Request.getDefaultInstance());
      text.append("no error\n");
    } catch (RpcException error) {
      text.append("error ").append(error.getMessage()).append('\n');
    }
    System.out.print(text);
    pool.shutdown();
    modelClient.stop();
    dictClient.stop();
  }

  /** Sends the token with every request, if there is one. */
  private static List<Interceptor> authorize(String token) {
    List<Interceptor> interceptors = new ArrayList<>();
    if (!token.equals("-")) {
      interceptors.add(
          new AbstractInterceptor() {
            @Override
            public boolean handleRequest(Request request) {
              request.setAuth(token);
              return true;
            }
          });
    }
    return interceptors;
  }

  /** Makes one ragged tensor per slot, with one row per line. */
  private static GeneralModel.Request request(List<String> lines, long logId) {
    Map<String, GeneralModel.Tensor.Builder> slots = new TreeMap<>();
    for (String line : lines) {
      String[] fields = line.split(" ");
      for (int at = 2; at < fields.length; ++at) {
        String slot = fields[at].split(":")[1];
        slots.computeIfAbsent(
            slot, name -> GeneralModel.Tensor.newBuilder().setAliasName(name).setName(name).addLod(0));
      }
    }
    for (String line : lines) {
      String[] fields = line.split(" ");
      for (int at = 2; at < fields.length; ++at) {
        String[] parts = fields[at].split(":");
        slots.get(parts[1]).addInt64Data(Long.parseUnsignedLong(parts[0]));
      }
      slots.values().forEach(slot -> slot.addLod(slot.getInt64DataCount()));
    }
    GeneralModel.Request.Builder request = GeneralModel.Request.newBuilder().setLogId(logId);
    slots.values().forEach(slot -> request.addTensor(slot.addShape(slot.getInt64DataCount()).addShape(1)));
    return request.build();
  }

  private static float[] floats(ByteString bytes) {
    float[] numbers = new float[bytes.size() / Float.BYTES];
    bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer().get(numbers);
    return numbers;
  }
}
